package collect_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/agent/collect"
)

// asIs is a server's codec that sends bytes as they are, without a copy, and
// reads nothing.
type asIs struct{}

func (asIs) Name() string { return "proto" }
func (asIs) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}
func (asIs) Unmarshal(mem.BufferSlice, any) error { return nil }

var _ encoding.CodecV2 = asIs{}

// serveRaw serves a stream of answers, the n-th to the n-th question.
func serveRaw(t *testing.T, answer func(n int) []byte) *counter {
	l := listen(t, "127.0.0.1:0")
	serveOn(t, l, func(*grpc.Server) {}, grpc.ForceServerCodecV2(asIs{}), grpc.UnknownServiceHandler(func(_ any, st grpc.ServerStream) error {
		for n := 0; ; n++ {
			if err := st.RecvMsg(nil); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
			if err := st.SendMsg(answer(n)); err != nil {
				return err
			}
		}
	}))
	return l
}

// A server of 100 MB, or one that fills the budget to the brim, costs less than
// twice the budget of bytes at any moment.
func TestHeapGrowthStaysUnderTwiceTheByteLimit(t *testing.T) {
	const limit = 32 << 20
	bytesOf := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var names []string
	for i := range 200 {
		names = append(names, fmt.Sprint("a.S", i))
	}
	list := bytesOf(listOf(names...))
	fill := func(size int) []byte {
		return bytesOf(filesOf(file{name: "f", pkg: string(make([]byte, size))}.raw()))
	}
	for _, tc := range []struct {
		name   string
		files  []byte // of every answer
		differ bool   // every answer is another one
		full   bool   // the budget is crossed
	}{
		{"answers of a megabyte without end", fill(1 << 20), true, true},
		{"the largest answers", fill(16<<20 - 100), true, true},
		{"empty files", bytesOf(filesOf(make([][]byte, 4096)...)), false, false},
		{"more empty files than may be", bytesOf(filesOf(make([][]byte, 8<<20)...)), false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			// Two buffers, so that the one being sent is not written to.
			answers := [2][]byte{bytes.Clone(tc.files), bytes.Clone(tc.files)}
			l := serveRaw(t, func(n int) []byte {
				if n == 0 {
					return list
				}
				next := answers[n%2]
				if tc.differ {
					binary.BigEndian.PutUint16(next[len(next)-2:], uint16(n))
				}
				return next
			})
			defer debug.SetGCPercent(debug.SetGCPercent(5))
			runtime.GC()
			var before runtime.MemStats
			runtime.ReadMemStats(&before)
			var peak atomic.Uint64
			ctx, cancel := context.WithCancel(context.Background())
			watched := make(chan struct{})
			go func() {
				defer close(watched)
				for ctx.Err() == nil {
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					peak.Store(max(peak.Load(), m.HeapAlloc))
					runtime.Gosched()
				}
			}()
			_, err := ask(t, l, collect.Budget{Wall: patience, Connect: patience})
			cancel()
			<-watched
			if tc.full {
				wantFailure(t, err, collect.Exhausted)
			} else if err != nil {
				t.Error(err)
			}
			if grown := int64(peak.Load()) - int64(before.HeapAlloc); grown > 2*limit {
				t.Errorf("the heap grew by %d MiB, want under %d", grown>>20, 2*limit>>20)
			} else {
				t.Logf("the heap grew by %d MiB", grown>>20)
			}
		})
	}
}

// A port that drips a byte now and then is no conversation.
func TestServerThatDripsEndsByTheBounds(t *testing.T) {
	for _, tc := range []struct {
		name  string
		greet string // before the dripping
		class collect.Class
	}{
		{"from the start", "", ""},
		// A frame of a kind that nobody knows, which is to be ignored.
		{"after the settings", "\x00\x00\x00\x04\x00\x00\x00\x00\x00" + "\x00\x10\x00\xfa\x00\x00\x00\x00\x00", collect.Deadline},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := acceptEach(t, func(c net.Conn) {
				_, _ = io.WriteString(c, tc.greet)
				gone := make(chan struct{})
				go func() { defer close(gone); _, _ = io.Copy(io.Discard, c) }()
				tick := time.NewTicker(100 * time.Millisecond)
				defer tick.Stop()
				for range 1000 {
					select {
					case <-gone:
						return
					case <-tick.C:
						if _, err := c.Write([]byte{0}); err != nil {
							<-gone
							return
						}
					}
				}
			})
			r, err := ask(t, l, collect.Budget{Wall: time.Second})
			if tc.class != "" {
				wantFailure(t, err, tc.class)
			} else if err != nil || len(r.Services) > 0 {
				t.Errorf("%+v, %v", r, err) // its first bytes are no HTTP/2
			}
			if n := l.accepted.Load(); n != 1 {
				t.Errorf("%d connections, want 1", n)
			}
		})
	}
}
