"""Training without lockstep: parameter servers, and ranks that average less often."""
