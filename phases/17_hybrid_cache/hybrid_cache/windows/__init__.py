"""Attention layers, full or sliding window: which pages (ranges of tokens) need KV blocks."""
