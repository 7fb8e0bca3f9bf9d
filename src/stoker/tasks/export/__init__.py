"""`stoker export`: writes a trained model in the formats from which it is served, and compares it with the original."""
