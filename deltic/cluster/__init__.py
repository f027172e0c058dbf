"""Many replicas of one model: which replica a request goes to, and Ray Serve as the cluster. No torch."""
