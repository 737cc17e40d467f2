"""Make pages, tables and plots from run folders."""
