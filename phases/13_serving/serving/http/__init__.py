"""HTTP: what may be asked and how it is answered."""
