package transcode_test

import "testing"

func TestMethodOfARequest(t *testing.T) {
	s := link(t, get("/v1/{id}"), get("/v1/new"), get("/v1/{id=a/*}/b"), get("/v2/{id=**}"), get("/v1/{id}:stop"), nil)
	for request, want := range map[string]string{
		"GET /v1/7":         "lib.Books/M0",
		"GET /v1/7?tags=x":  "lib.Books/M0",
		"GET /v1/new":       "lib.Books/M1",
		"GET /v1/a/7/b":     "lib.Books/M2",
		"GET /v2/7/8":       "lib.Books/M3",
		"GET /v1/7:stop":    "lib.Books/M4",
		"GET /v1":           "",
		"GET /v1/":          "",
		"GET /v1/7/8":       "",
		"PUT /v1/7":         "",
		"GET /lib.Books/M5": "",
	} {
		if got := s.Method(request[:3], request[4:]); got != want {
			t.Errorf("%s: %q, want %q", request, got, want)
		}
	}
}
