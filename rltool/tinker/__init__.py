"""The trainer for a user's own loop: Tinker's API over a served trainer, durable and for several clients."""
