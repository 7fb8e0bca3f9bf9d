"""What runs inside a rank before and around the script: settings, rank discovery, address exchange, output, failures."""
