"""Each rank in a process of its own: what travels, over which connections, and what fails."""
