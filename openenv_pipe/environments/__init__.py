"""OpenEnv's side: clients, hosts of servers, adapters, tasks."""
