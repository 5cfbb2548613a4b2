"""Stores: load, scan, compare-and-swap. They hold no rules."""
