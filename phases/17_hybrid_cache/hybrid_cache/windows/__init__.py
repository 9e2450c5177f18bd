"""Layers with keys and values: which pages they need, and the blocks behind them."""
