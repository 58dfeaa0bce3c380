package ads

import "errors"

// Streams is what is kept of streams: they and the ids of their clients.
func (s *Server) Streams() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := len(s.streams)
	for _, u := range s.ids {
		n += u.streams
	}
	return n
}

// Encode is what the codec makes of a response.
func Encode(m any) ([]byte, error) {
	if m, ok := m.(*message); ok {
		return m.encode().Materialize(), nil
	}
	return nil, errors.New("no response")
}
