"""Facts for `paceline verify`: what real ranks hold, send and compute, beside a single device."""
