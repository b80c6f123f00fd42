"""The frontend: parses, routes, follows and answers the clients' requests."""
