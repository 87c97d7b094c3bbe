"""A weight sync, from the trainer's parameters to the engines: its order, connections and reports. Sending, transports,
deltas and checks of the result are sub-packages."""
