"""refold inside other libraries' models. Only the given instance is changed."""
