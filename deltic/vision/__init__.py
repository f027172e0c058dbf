"""Pictures and videos: from files to patches and prompts."""
