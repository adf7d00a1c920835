"""Runs over real sites with Flower: a server app, a client app, and a worker that stays at each site."""

from fedstrata.runtime.flower.deployment import Deployment as Deployment
