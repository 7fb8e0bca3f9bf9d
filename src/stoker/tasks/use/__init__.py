"""`stoker use`: tries a trained model of any kind on texts."""
