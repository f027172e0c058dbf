"""Pictures and videos: converts files to patches and prompts."""
