"""Side-by-side runs against peers; each prints one table, then one line of JSON."""
