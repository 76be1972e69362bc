"""Tools that look at an installation and say what it does."""
