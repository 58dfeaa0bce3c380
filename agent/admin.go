package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/csds"
)

// httpRetry is how long the agent waits between tries to listen at an address
// that is taken: an agent that is being replaced holds it until it is gone.
const httpRetry = 2 * time.Second

// health adds what probes and scrapers ask for.
func (a *Agent) health(mux *http.ServeMux) {
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]bool{"live": true})
	})
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, r *http.Request) {
		if err := a.Ready(r.Context()); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, Readiness{Reason: err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, Readiness{Ready: true, Reason: a.missing()})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.registry, promhttp.HandlerOpts{}))
}

// admin is what the command line and tools for xDS ask, and pprof.
func (a *Agent) admin() http.Handler {
	mux := http.NewServeMux()
	a.health(mux)
	get := func(path string, answer func(*http.Request) (any, error)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			v, err := answer(r)
			if err != nil {
				http.Error(w, err.Error(), http.StatusNotFound)
				return
			}
			writeJSON(w, http.StatusOK, v)
		})
	}
	get("/status", func(*http.Request) (any, error) { return a.Status(), nil })
	get("/owners", func(*http.Request) (any, error) {
		views := []OwnerView{}
		for _, o := range a.dir.Owners() {
			v := viewOwner(o, a.only)
			v.told(a, o)
			v.differs(a.follower.Change(o.Key))
			views = append(views, v)
		}
		return views, nil
	})
	get("/services", func(*http.Request) (any, error) { return a.services(), nil })
	get("/peers", func(*http.Request) (any, error) { return a.viewPeers(), nil })
	get("/paths", func(*http.Request) (any, error) { return a.paths.view(), nil })
	get("/proxies", func(*http.Request) (any, error) { return a.server.Clients(), nil })
	get("/explain/pod", func(r *http.Request) (any, error) { return a.explainPod(r.FormValue("name")) })
	get("/explain/service", func(r *http.Request) (any, error) { return a.explainService(r.FormValue("name")), nil })
	get("/explain/workload", func(r *http.Request) (any, error) { return a.explainWorkload(r.FormValue("name")) })
	get("/explain/call", func(r *http.Request) (any, error) {
		headers := map[string]string{}
		for _, h := range r.URL.Query()["header"] {
			name, value, _ := strings.Cut(h, "=")
			headers[name] = value
		}
		return a.explainCall(r.FormValue("from"), r.FormValue("authority"), r.FormValue("path"), r.FormValue("method"), headers)
	})
	get("/wait", func(r *http.Request) (any, error) { return a.waited(r.FormValue("service")), nil })
	get("/decisions", a.serveDecisions)
	mux.HandleFunc("POST /recollect", a.serveRecollect)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	g := grpc.NewServer()
	csds.Register(g, a.server)
	reflection.Register(g)
	for service := range g.GetServiceInfo() {
		mux.Handle("POST /"+service+"/", g)
	}
	return mux
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // the asker is gone
}

// newHTTPServer speaks HTTP/1 and, for gRPC, HTTP/2 without TLS.
func newHTTPServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, Protocols: &p}
}

// serveHTTP serves until ctx ends.
func serveHTTP(ctx context.Context, lis net.Listener, h http.Handler) error {
	s := newHTTPServer(h)
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// serveHealth listens at the HTTP address, as soon as it is free, and serves
// until ctx ends.
func (a *Agent) serveHealth(ctx context.Context) error {
	mux := http.NewServeMux()
	a.health(mux)
	for said := false; ; said = true {
		lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", a.config.HTTPAddress)
		if err == nil {
			a.setPart("http", "on")
			if said {
				a.log.Info("http address is free now", "address", a.config.HTTPAddress)
			}
			return serveHTTP(ctx, lis, mux)
		}
		a.setPart("http", "off: "+err.Error())
		if !said {
			a.log.Warn("http address is not free; trying on", "address", a.config.HTTPAddress, "error", err)
		}
		select {
		case <-time.After(httpRetry):
		case <-ctx.Done():
			return nil
		}
	}
}

// Status says how the agent is.
func (a *Agent) Status() Status {
	src, counts, clients := a.source.Status(), a.dir.Counts(), a.server.Clients()
	s := Status{
		Node:    a.config.nodeName(),
		Version: a.config.Version,
		Source:  Source{Kind: src.Kind, Synced: src.Synced, StaleSeconds: int64(src.StaleSeconds), Error: src.Error},
		Owners:  map[string]int{},
		Pods:    counts.Pods[nodecache.Serving] + counts.Pods[nodecache.Draining],
		Proxies: len(clients),
		Parts:   a.partStates(),
	}
	s.Gate, s.Reason = a.gateState()
	s.Parts[partSockets], s.Parts["routes"] = a.socketState(), src.Routes
	s.Parts[partPeers] = a.peersState()
	s.Parts[partPath], s.Parts[partObserve] = onOff(why(&a.paths.noPath)), onOff(why(&a.paths.noObserve))
	if src.Kind == "kube" {
		s.Parts[partScale] = a.scale(src)
	}
	for k, n := range counts.Owners {
		s.Owners[k.String()] = n
	}
	for _, c := range clients {
		for _, t := range c.Types {
			if t.Nack != nil {
				s.Nacks++
			}
			s.Withheld += len(t.Withheld) + t.Suspects
		}
		if c.State != "" {
			s.Slow++
		}
		if len(c.Warnings) > 0 {
			s.Limited++
		}
	}
	return s
}
