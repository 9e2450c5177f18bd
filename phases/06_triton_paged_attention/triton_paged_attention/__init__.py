"""Phase 06."""
