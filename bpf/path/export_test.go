package path

// Events is the descriptor of the socket that says what changes.
func (m *Map) Events() int { return m.events.GetFd() }

// Forget makes all that is known old, as a change does.
func (m *Map) Forget() { m.forget() }
