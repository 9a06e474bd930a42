"""Keep it alive: a controller, one agent for each node, and what they say to each other."""
