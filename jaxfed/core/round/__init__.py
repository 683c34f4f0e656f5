"""One federated round: the problem, the clients' part and the server's part."""
