"""The config file: reading and writing it, the questionnaire that makes one, checks, and migration of old files."""
