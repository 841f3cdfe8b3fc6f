"""Records, schemas, space and settings: the types that all other packages use."""
