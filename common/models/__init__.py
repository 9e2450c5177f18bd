"""Models on disk and on the hub: configuration, checkpoints, the two bundled models."""
