package ads_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestDisperseEndsRunningStreamsAndServesLaterOnes(t *testing.T) {
	w := openWorld(t)
	for range 2 {
		running := []*stream{w.delta(), w.sotw(), w.delta()}
		for _, s := range running {
			s.sub(cds)
			s.want(cds)
		}
		ctx, cancel := context.WithTimeout(w.ctx, patience)
		if err := w.server.Disperse(ctx, 20*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		cancel()
		for _, s := range running {
			if err := s.ended(); status.Code(err) != codes.Unavailable {
				t.Fatalf("got %v", err)
			}
		}
	}
	s := w.delta()
	s.sub(cds)
	s.want(cds)
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	if err := w.server.Shutdown(ctx, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if err := s.ended(); status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
}
