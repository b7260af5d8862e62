"""Messages, their codec, and the only ZeroMQ sockets outside the TCP transport."""
