"""Sums over ranks by kernels over the peers' memory, with the addition behind them."""
