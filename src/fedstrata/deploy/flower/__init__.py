"""Runs over real sites with Flower: a server app, a client app, and a worker process at each site."""

from fedstrata.deploy.flower.deployment import Deployment as Deployment
