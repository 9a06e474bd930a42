"""Time training steps on real ranks: the session of `paceline run` with clocks around it."""
