// Workload is what the cluster tests run in pods: a gRPC server that says how
// often it was asked what it serves, and a client that calls it all the time.
//
//	workload serve -services shop.v1.Cart,shop.v1.Stock [-port 50051] [-name NAME] [-linger 10s]
//	workload call  -services shop.v1.Cart,shop.v1.Stock [-target 127.0.0.1:15001]
//	workload call  -services shop.v1.Cart@cart.shop.svc:50051,shop.v1.Solo@solo.shop.svc:50051
//	workload forge -target AGENT:9642
//
// The last one poses as an agent, with a key that nobody vouches for, and fails
// if it is not refused. The others write JSON, one object a line, to standard output (see [Line]); tests
// read it as the log of the container.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// Line is one line of output. Which fields are set depends on Kind.
type Line struct {
	Time time.Time `json:"time"`
	// Kind is
	//	serving    the server listens
	//	collected  somebody asked the server by reflection
	//	unary      a unary call failed
	//	stream     a stream ended that the client had not ended
	//	tally      counters of the client since its start, once a second
	Kind string `json:"kind"`
	// Code and Message are the gRPC status of a call that failed.
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
	Service string `json:"service,omitempty"`
	// Server is the pod at the other end of a stream, "" before its first
	// answer. Of "collected" it is the address of who asked.
	Server string `json:"server,omitempty"`
	// Millis is how long the call lasted.
	Millis int64 `json:"ms,omitempty"`
	// Tally is there in lines of that kind.
	Tally *Tally `json:"tally,omitempty"`
}

// Tally counts what a client did since it started.
type Tally struct {
	Unary    int64 `json:"unary"`    // calls that were answered
	Failed   int64 `json:"failed"`   // calls that were not
	Messages int64 `json:"messages"` // answers on streams
	Cut      int64 `json:"cut"`      // streams that the client had not ended
	Open     int64 `json:"open"`     // streams at the moment
	// SlowestMillis is the longest answered unary call since the last tally.
	SlowestMillis int64 `json:"slowest_ms"`
	// Answered are the pods that have answered unary calls, sorted, by what was
	// to be called, as -services says it.
	Answered map[string][]string `json:"answered"`
}

// out writes lines. It is safe for concurrent use.
type out struct{ lines *log.Logger }

func (o *out) write(l Line) {
	l.Time = time.Now().UTC()
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // Line has nothing that JSON has not
	}
	o.lines.Print(string(text))
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "workload:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("say serve, call or forge")
	}
	o := &out{lines: log.New(os.Stdout, "", 0)}
	f := flag.NewFlagSet(args[0], flag.ExitOnError)
	services := f.String("services", "", "comma-separated `names` of gRPC services; to be called, with @HOST:PORT if not by -target")
	switch args[0] {
	case "serve":
		port := f.Int("port", 50051, "port to listen at")
		name := f.String("name", os.Getenv("POD_NAME"), "how the server calls itself")
		linger := f.Duration("linger", 0, "how long to go on as before once told to stop")
		_ = f.Parse(args[1:]) // exits
		return serve(ctx, o, *name, *port, strings.Split(*services, ","), *linger)
	case "call":
		target := f.String("target", "127.0.0.1:15001", "where the sidecar listens")
		timeout := f.Duration("timeout", 10*time.Second, "deadline of a unary call, and of an answer on a stream")
		every := f.Duration("every", 50*time.Millisecond, "time between the calls of one caller")
		callers := f.Int("callers", 2, "unary callers of each service")
		streams := f.Int("streams", 2, "streams of each service")
		_ = f.Parse(args[1:]) // exits
		c := &caller{out: o, services: strings.Split(*services, ","), timeout: *timeout, every: *every}
		return c.run(ctx, *target, *callers, *streams)
	case "forge":
		target := f.String("target", "", "where an agent answers the others")
		_ = f.Parse(args[1:]) // exits
		return forge(ctx, *target)
	}
	return fmt.Errorf("%q: say serve, call or forge", args[0])
}
