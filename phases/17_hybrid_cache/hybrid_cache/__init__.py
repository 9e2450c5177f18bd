"""Phase 17: hybrid caches. Layers that remember differently share one pool of blocks."""
