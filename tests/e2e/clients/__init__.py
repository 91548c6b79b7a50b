"""Programs that people use with other servers, against real engine processes."""
