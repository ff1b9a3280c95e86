"""How exact the client is: a scripted server that stamps what it does, and the client's numbers against its stamps."""
