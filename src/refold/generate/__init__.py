"""Text generation: a prefill, then one step of the recurrence per token, in a loop that stays on the device."""
