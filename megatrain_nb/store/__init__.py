"""Bytes by key: RAM slabs with a hard budget, and tiles on NVMe past the page cache."""
