"""Looking at a server while it runs: metrics, its log, and pictures of the engine."""
