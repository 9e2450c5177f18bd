"""Compile every kernel before the first request, by serving made-up requests (warm-up)."""
