"""Other engines behind the same server."""
