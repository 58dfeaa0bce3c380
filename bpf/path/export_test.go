package path

// Events is the descriptor of the socket that says what changes.
func (t *Table) Events() int { return t.events.GetFd() }

// Forget makes all that is known old, as a change does.
func (t *Table) Forget() { t.forget() }
