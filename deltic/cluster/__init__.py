"""Many replicas of one model on Ray Serve: chooses the replica of each request. No torch."""
