"""Pictures and films on their way in: from files to patches, and where their tokens stand in a prompt."""
