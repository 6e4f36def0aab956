"""Parts of bench_peers.py: one child per peer, what surrounds a measurement, tables and plots."""
