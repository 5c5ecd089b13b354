"""Where records of metrics go, a file for each kind of place."""
