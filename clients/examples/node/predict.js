// Predicts twice: with the server's own Predict, and with the Open Inference Protocol's ModelInfer.
//
//     npm ci
//     node predict.js 127.0.0.1:8500 '[[0, 1, 2], [3, 4, 5]]'
//
// For a model with one float32 input. Prints one JSON object.
//
// The variables UNDERSTUDY_TLS_CA, UNDERSTUDY_TLS_CERT, UNDERSTUDY_TLS_KEY and UNDERSTUDY_TOKEN_FILE name files, as for
// the commands of understudy. The token is read for each call, and goes to other machines over TLS only.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { promisify } = require("node:util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = path.join(__dirname, "..", "..", "..", "proto");
const DEADLINE_MILLISECONDS = 30000;

function load(file) {
  const includeDirs = [PROTOS, path.join(PROTOS, "third_party")];
  const options = { includeDirs, keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };
  return grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
}

function fileIn(variable) {
  const file = process.env[`UNDERSTUDY_${variable}`];
  return file ? fs.readFileSync(file) : null;
}

function channelCredentials() {
  const ca = fileIn("TLS_CA");
  return ca ? grpc.credentials.createSsl(ca, fileIn("TLS_KEY"), fileIn("TLS_CERT")) : grpc.credentials.createInsecure();
}

/** Metadata with the token. It may go without TLS to this machine only. */
function authorization(target) {
  const metadata = new grpc.Metadata();
  const token = fileIn("TOKEN_FILE");
  if (token) {
    if (!process.env.UNDERSTUDY_TLS_CA && !/^(127\.0\.0\.1|localhost):\d+$/.test(target)) {
      throw new Error(`the token would be sent to ${target} without TLS; set UNDERSTUDY_TLS_CA`);
    }
    metadata.set("authorization", `Bearer ${token.toString("ascii").trim()}`);
  }
  return metadata;
}

/** Returns a function that calls one method of a client and returns a promise of the response. */
function caller(client, method, target) {
  const call = promisify(client[method].bind(client));
  return (request) => call(request, authorization(target), { deadline: Date.now() + DEADLINE_MILLISECONDS });
}

/** The elements of nested arrays, in row-major order. */
function flattened(rows) {
  return rows.flat(Infinity);
}

function shapeOf(rows) {
  return Array.isArray(rows) ? [rows.length, ...shapeOf(rows[0])] : [];
}

function toBytes(numbers) {
  const bytes = Buffer.alloc(numbers.length * 4);
  numbers.forEach((number, index) => bytes.writeFloatLE(number, index * 4));
  return bytes;
}

function toNumbers(bytes) {
  return Array.from({ length: bytes.length / 4 }, (_, index) => bytes.readFloatLE(index * 4));
}

async function main(target, json) {
  const rows = JSON.parse(json);
  const numbers = flattened(rows);
  const shape = shapeOf(rows);
  const credentials = channelCredentials();

  const own = load("understudy/v1/prediction.proto").understudy.v1;
  const models = load("understudy/v1/model.proto").understudy.v1;
  const inference = load("understudy/oip/inference.proto").inference;
  const clients = {
    model: new models.ModelService(target, credentials),
    prediction: new own.PredictionService(target, credentials),
    inference: new inference.GRPCInferenceService(target, credentials),
  };
  try {
    const metadata = await caller(clients.model, "GetModelMetadata", target)({});
    const name = metadata.inputs[0].name;

    const tensor = { dtype: "DATA_TYPE_FLOAT32", shape, content: toBytes(numbers) };
    const predicted = await caller(clients.prediction, "Predict", target)({ inputs: { [name]: tensor } });

    const input = { name, datatype: "FP32", shape, contents: { fp32_contents: numbers } };
    const request = { model_name: metadata.model_name, id: "from-node", inputs: [input] };
    const inferred = await caller(clients.inference, "ModelInfer", target)(request);

    const [output] = Object.values(predicted.outputs);
    console.log(
      JSON.stringify({
        model: metadata.model_name,
        predict: { step: predicted.step, values: toNumbers(output.content) },
        modelInfer: {
          id: inferred.id,
          step: Number(inferred.model_version),
          values: inferred.outputs[0].contents.fp32_contents,
        },
      }),
    );
  } finally {
    Object.values(clients).forEach((client) => client.close());
  }
}

main(process.argv[2] ?? "127.0.0.1:8500", process.argv[3] ?? "[[0]]").catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
