package ads

import "errors"

// Encode is what the codec makes of a response.
func Encode(m any) ([]byte, error) {
	if m, ok := m.(*message); ok {
		return m.encode().Materialize(), nil
	}
	return nil, errors.New("no response")
}
