"""What `fedstrata deploy` does while sites and server run, one file per group of actions."""
