"""The small operators around attention. Nothing here is needed to understand attention itself."""
