"""Sums over ranks by kernels over the peers' memory, with the addition and the norm behind them."""
